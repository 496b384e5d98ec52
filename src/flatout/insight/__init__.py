"""What a run tells: why it is slow (`diagnose`), for any script (`attach`), with proof (`prove`). Reads run folders."""
