"""What the sources share: finding images by name, guessing columns, collecting rows, reading text and tar files."""
