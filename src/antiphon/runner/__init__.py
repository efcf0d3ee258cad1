"""Where stages run: in the engine's thread, in threads of their own, in processes of their own."""
