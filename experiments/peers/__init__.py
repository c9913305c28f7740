"""Side by side with other implementations. Each script takes the path of a checkout, and is skipped without it."""
