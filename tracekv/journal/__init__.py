"""Records and where they are kept: written on a callback's path, read by views. Knows no connector and no OpenTelemetry."""
