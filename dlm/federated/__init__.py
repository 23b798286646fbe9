"""Users' text becomes a model, privately: sampling, noise, accounting and the network itself."""
