"""What `profiling.report` is made of: result files (data.py), pictures (figures.py), the page (page.py)."""
