"""An engine as three steps that may run on different servers: render (text to tokens), generate (tokens to tokens), derender."""
