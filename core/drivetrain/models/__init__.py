"""Models as data. ``spec`` says what a model is, ``families`` reads it from a configuration, ``build`` makes and loads
the one ``Decoder``. Importing this package loads nothing: specs, families and sources work without torch."""
