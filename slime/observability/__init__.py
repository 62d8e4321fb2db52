"""What a person looks at: metrics, progress, logs, traces and dumps. Reads samples and numbers, never drives a run."""
