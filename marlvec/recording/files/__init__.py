"""Files of a recording: manifest, schema, and the parts with the rows."""
