"""Stand-ins for the seams that tests may fake: stages and clocks. Each passes the contract of the real one."""
