"""The parts of a server, which has one thread; its public class is `marlvec.external.Server`."""
