"""MiniCPM-o 4.5. Module and parameter names are those of the released checkpoint."""
