"""Several products in one call; one file per public function."""
