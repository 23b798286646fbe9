"""The guarantee of a run's noise: rho-zCDP and (epsilon, delta), over all stages together."""
