"""N-grams and how often they occur to adjusted counts of every order."""
