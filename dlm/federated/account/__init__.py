"""What a run's noise guarantees: rho-zCDP and (epsilon, delta), over all stages together."""
