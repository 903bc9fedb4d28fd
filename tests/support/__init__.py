"""What several tests share: one tiny configuration, starting ranks and programs, models and meters."""
