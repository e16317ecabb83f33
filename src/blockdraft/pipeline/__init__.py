"""What the commands do: settings in, a result out. No printing of results here, and no parsing of flags."""
