"""PTX text to a program: lexer, parser, control flow."""
