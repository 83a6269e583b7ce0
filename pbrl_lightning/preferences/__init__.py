"""From scored joint responses to training pairs: oracle, pair selection, round files, replay."""
