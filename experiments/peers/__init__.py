"""Side by side with other implementations. The releases are run as they are, from a checkout or as installed."""
