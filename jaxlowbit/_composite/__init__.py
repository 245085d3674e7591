"""Several products in one call, a file for each public function."""
