"""The engines behind the seam: local files, S3 through obstore, and any other fsspec file system."""
