"""Objects in stores: S3, Google Cloud, Azure, HTTP servers and the Hugging Face hub."""
