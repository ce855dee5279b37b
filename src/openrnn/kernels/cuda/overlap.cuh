// Programmatic dependent launch of kernels that run for a few microseconds.

// Lets the next launch of the stream begin, and waits until the one before has ended: a launch
// begins early, but reads and writes nothing early.
INLINE void overlap_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
