"""What connector authors import in their own tests."""
