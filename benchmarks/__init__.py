"""Speed, as ratios of things measured interleaved in one run; each module prints one JSON line per case."""
