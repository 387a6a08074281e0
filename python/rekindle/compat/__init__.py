"""Other systems' protocols and interfaces over Rekindle."""
