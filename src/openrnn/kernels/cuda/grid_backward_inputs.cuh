// The ring of inputs of the backward loop of a grid. That of blocks and clusters, whose places
// advance from step to step, is in backward_setup.cuh.

// The entry of slot s in the ring of inputs, in step i. It is found from i, because a grid's step
// takes as long as its way through L2, not as its instructions.
INLINE int entry_of(const Place& here, int s, int i) {
    return AT_RING + ((here.warp * SLOTS + s) * STAGES + i % STAGES) * ENTRY_BYTES;
}

// A warp's ring buffer of inputs: dy, saved activations and resets of its slots.
struct Inputs {
    const storage_t *dy[SLOTS], *saved[SLOTS];
    bool has_dy[SLOTS], has_saved[SLOTS];

    // the sources of slot s; tiles: of 8 rows, in the batch
    INLINE void find(const BackwardArgs& args, const Place& here, const Time& time, int64 tiles,
                     const int* tile_rows, const Slot& slot, int s) {
        const int group = here.first_group + slot.group;
        // a lane copies 16 bytes of dy: [row, 8 units]
        const int line = here.lane * PIECE / 8;
        const int b = slot.owned && here.lane * 16 < DY_BYTES ? tile_rows[line] : -1;
        has_dy[s] = args.dy && b >= 0;
        dy[s] = has_dy[s] ? advanced(args.dy, time.to_first * args.dy_step_bytes) +
                                b * args.dy_row + group * 8 + here.lane * PIECE % 8
                          : args.weight;
        const int64 tile = here.first_row / 8 + slot.tile;
        has_saved[s] = slot.owned && tile < tiles;
        saved[s] = has_saved[s] ? advanced(args.saved, time.to_first * args.saved_step_bytes) +
                                      (tile * GROUPS + group) * (64 * SAVED) +
                                      saved_offset(here.lane)
                                : args.weight;
    }
    INLINE void copy(const BackwardArgs& args, const Place& here, const Time& time,
                     const SavedPlace& place, const int& later, const bool (&owned)[SLOTS],
                     Resets (&resets)[SLOTS], int i) {
        #pragma unroll
        for (int s = 0; s < SLOTS; ++s) {
            const uint32 target = shared_address(shared + entry_of(here, s, i));
            if (here.lane * 16 < DY_BYTES)
                copy_async<16>(target + here.lane * 16, dy[s],
                               i < time.count && has_dy[s] ? 16 : 0);
            copy_saved_async(target + DY_BYTES, saved[s], place, i < time.count && has_saved[s]);
            if (RESET)
                resets[s].copy(target + SLOT_BYTES + reset_offset(here.lane),
                               here.thread_in_group, time.direction, args.reset_step_bytes,
                               owned[s] && i < time.count && (i > 0 || !later));
            dy[s] = advanced(dy[s], args.dy_step_bytes);
            saved[s] = advanced(saved[s], args.saved_step_bytes);
        }
        commit_copies();
    }
};
