"""What users import; everything public is exported by `anabranch` itself."""
