"""The parts of a client; its public class is `marlvec.external.Client`."""
