"""What a server shows of itself while it runs: hosts, replicas and ranks, and how they spend their time."""
