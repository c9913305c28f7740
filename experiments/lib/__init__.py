"""What the experiments share: one of each tool."""
