"""Any language, any person: a model's scores by gRPC and by HTTP with JSON, from one contract."""
