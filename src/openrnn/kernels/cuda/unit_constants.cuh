// What a lane keeps of a unit for all rows and steps of a forward kernel.

// What the unit adds to its gates in each step, and its per-unit parameters.
struct UnitConstants {
    float bias_x[GATES], bias_r[GATES], vectors[VECTORS + 1];

    // inside: the unit is one of this lane's and no padding
    template <class Args>
    INLINE void load(const Args& args, int unit, bool inside) {
        #pragma unroll
        for (int gate = 0; gate < GATES; ++gate) {
            const bool has_x = inside && args.bias_x;
            bias_x[gate] = has_x ? widen(args.bias_x[gate * args.hidden + unit]) : 0.0f;
            const bool has_r = inside && args.bias_r;
            bias_r[gate] = has_r ? widen(args.bias_r[gate * args.hidden + unit]) : 0.0f;
            if (SUMMED >> gate & 1) {  // one register serves both sides
                bias_r[gate] = scale_of(gate) * (bias_r[gate] + bias_x[gate]);
                bias_x[gate] = 0.0f;
            }
        }
        #pragma unroll
        for (int v = 0; v < VECTORS; ++v)
            vectors[v] = inside ? widen(args.vectors[v * args.hidden + unit]) : 0.0f;
    }

    // The part of a gate's sum that is known before h is; given: the input side.
    INLINE float start(int gate, float given) const {
        return bias_r[gate] + (SUMMED >> gate & 1 ? scale_of(gate) * given : 0.0f);
    }
};
