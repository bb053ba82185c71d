"""Ways for ranks to reach one another's memory, behind one interface (`base`); `select` chooses."""
