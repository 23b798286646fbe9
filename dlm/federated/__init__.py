"""Users' devices train a model privately: mechanisms, accounting, rounds and reports."""
