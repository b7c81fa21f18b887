"""What a step may do beside forward and sample: each file is a collaborator of the runner, see `launch.Feature`."""
