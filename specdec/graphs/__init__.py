"""Steps of fixed shapes, captured or recorded once and replayed."""
