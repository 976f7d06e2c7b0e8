// Attention over the paged cache, of keys and values or of latents. A unit of work is a block of a row's
// query tokens times the query heads of one KV head; where there are too few units for the threads, each of
// its segments is one.
#include <algorithm>
#include <cmath>

#include "exec.h"

namespace pega {

namespace {

// The sizes of a call, and how queries are grouped.
struct Attention {
    const float* q;
    float* out;
    KvView kv;
    const int32_t *starts, *lens, *contexts, *table;
    int64_t step_tokens, pages;
    int64_t rows, width;  // width: blocks a row of the table
    int64_t heads, kv_heads;
    int64_t d, value_dim;
    int64_t together;  // query heads of a KV head that one unit takes
    int64_t parts;     // units a KV head is split into
    int64_t tokens;    // query tokens a unit
    int32_t kv_format;
    float scale, v_scale;

    template <class Args>
    Attention(const Instr& in, const Args& a, const KvView& view, int64_t value_dim, double k_scale = 1,
              double v_scale = 1)
        : q(a.q),
          out(a.out),
          kv(view),
          starts(a.query_starts),
          lens(a.query_lens),
          contexts(a.context_lens),
          table(a.block_table),
          step_tokens(a.T),
          pages(a.N),
          rows(a.R),
          width(a.W),
          heads(a.H),
          kv_heads(view.heads),
          d(a.D),
          value_dim(value_dim),
          together(std::min<int64_t>(heads / kv_heads, kMaxQueries)),
          parts((heads / kv_heads + together - 1) / together),
          tokens(kMaxQueries / together),
          kv_format(in.kv_format),
          scale(static_cast<float>(a.scale * k_scale)),
          v_scale(static_cast<float>(v_scale)) {}

    bool latent() const { return kv.parts == 1; }
    int64_t columns() const { return kv_heads * parts; }
};

Attention attention_of(const Instr& in) {
    if (in.op == kLatentAttention) {
        const auto a = in.args<LatentAttentionArgs>();
        return {in, a, latent_view(in, a), a.K};
    }
    const auto a = in.args<AttentionArgs>();
    return {in, a, kv_view(in, a), a.D, a.k_scale, a.v_scale};
}

// The queries of one unit, with their rows of q and out.
struct Unit {
    const QueryBlock* block;
    int64_t kv_head, queries;
    const float* q[kMaxQueries];
    float* out[kMaxQueries];
    int64_t seen[kMaxQueries];

    Unit(const Exec& e, const Attention& a, int64_t unit) {
        block = &e.blocks[static_cast<size_t>(unit / a.columns())];
        kv_head = unit % a.columns() / a.parts;
        const int64_t group = a.heads / a.kv_heads, first = unit % a.parts * a.together;
        const int64_t last = std::min(group, first + a.together);
        queries = 0;
        for (int64_t t = 0; t < block->count; t++)
            for (int64_t h = first; h < last; h++, queries++) {
                const int64_t at = (block->first + t) * a.heads + kv_head * group + h;
                q[queries] = a.q + at * a.d;
                out[queries] = a.out + at * a.value_dim;
                seen[queries] = block->seen - (block->count - 1 - t);
            }
    }
};

// Where token `at` of the unit's context has its key, or the last one where it has not so many.
const uint8_t* keys_at(const Attention& a, const Unit& u, int64_t at) {
    at = std::min(at, u.block->seen - 1) / 16 * 16;
    const int64_t block = a.table[u.block->row * a.width + at / a.kv.block_size];
    return a.kv.keys(block, u.kv_head) + at % a.kv.block_size * a.d * a.kv.bytes;
}

// next: what this thread is likely to do after it.
void attend_segment(const Exec& e, const Attention& a, const Unit& u, int64_t segment, const Unit& next_unit,
                    int64_t next_segment, const Scratch& s, float* max, float* sum, float* acc) {
    const uint8_t *keys[kSegment / 16 + kPagesAhead], *values[kSegment / 16], *next[kSegment / 16];
    const int64_t start = segment * kSegment;
    const int64_t tokens = std::min<int64_t>(kSegment, u.block->seen - start), pages = (tokens + 15) / 16;
    for (int64_t i = 0; i < pages + kPagesAhead; i++) {
        keys[i] = keys_at(a, u, start + 16 * i);
        if (i < pages) {
            values[i] = keys[i] + (a.latent() ? 0 : a.kv.block_size * a.d * a.kv.bytes);
            next[i] = keys_at(a, next_unit, next_segment * kSegment + 16 * i);
        }
    }
    e.kernels->attend({u.q, u.queries, u.seen, keys, values, next, start, tokens, a.d, a.value_dim, a.d,
                       a.kv_format, a.latent(), a.scale, s.scores, max, sum, acc});
}

// A unit's segments in order, merged as they come.
void run_whole(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Attention a = attention_of(e.instr(ph));
    // Later tokens see more: the long units go first, so that threads end together.
    const Unit u(e, a, ph.chunks - 1 - chunk);
    const Scratch& s = e.scratch[static_cast<size_t>(thread)];
    float max[kMaxQueries], sum[kMaxQueries], top[kMaxQueries], total[kMaxQueries];
    std::fill(top, top + u.queries, -INFINITY);
    std::fill(total, total + u.queries, 0.0f);
    std::fill(s.total, s.total + u.queries * a.value_dim, 0.0f);
    for (int64_t segment = 0; segment * kSegment < u.block->seen; segment++) {
        attend_segment(e, a, u, segment, u, segment + 1, s, max, sum, s.part);
        for (int64_t i = 0; i < u.queries; i++)
            e.kernels->merge(top + i, total + i, s.total + i * a.value_dim, max[i], sum[i],
                             s.part + i * a.value_dim, a.value_dim);
    }
    for (int64_t i = 0; i < u.queries; i++)
        e.kernels->divide(u.out[i], s.total + i * a.value_dim, total[i] / a.v_scale, a.value_dim);
}

// Where a unit's segment keeps max, sum and acc between the two phases of a split call.
float* partial(const Exec& e, const Attention& a, const Unit& u, int64_t column, int64_t segment) {
    const int64_t at = (u.block->segment + segment) * a.columns() + column;
    return e.partials + at * kMaxQueries * (2 + e.limits.head_dim);
}

void run_segment(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Attention a = attention_of(e.instr(ph));
    const auto locate = [&](int64_t chunk, int64_t* segment) {
        const int64_t all = chunk / a.columns(), column = chunk % a.columns();
        int64_t b = 0;
        while (b + 1 < e.num_blocks && e.blocks[static_cast<size_t>(b + 1)].segment <= all) b++;
        *segment = all - e.blocks[static_cast<size_t>(b)].segment;
        return Unit(e, a, b * a.columns() + column);
    };
    int64_t mine, then;
    const Unit u = locate(chunk, &mine), next = locate(std::min(chunk + 1, ph.chunks - 1), &then);
    float* to = partial(e, a, u, chunk % a.columns(), mine);
    attend_segment(e, a, u, mine, next, then, e.scratch[static_cast<size_t>(thread)], to, to + kMaxQueries,
                   to + 2 * kMaxQueries);
}

void run_merge(const void* context, const Phase& ph, int64_t chunk, int thread) {
    const Exec& e = *static_cast<const Exec*>(context);
    const Attention a = attention_of(e.instr(ph));
    const Unit u(e, a, chunk);
    float* acc = e.scratch[static_cast<size_t>(thread)].total;
    for (int64_t i = 0; i < u.queries; i++) {
        float top = -INFINITY, total = 0;
        std::fill(acc, acc + a.value_dim, 0.0f);
        for (int64_t segment = 0; segment * kSegment < u.block->seen; segment++) {
            const float* from = partial(e, a, u, chunk % a.columns(), segment);
            e.kernels->merge(&top, &total, acc, from[i], from[kMaxQueries + i],
                             from + 2 * kMaxQueries + i * a.value_dim, a.value_dim);
        }
        e.kernels->divide(u.out[i], acc, total / a.v_scale, a.value_dim);
    }
}

// Cuts the step's rows into blocks of query tokens, and checks all that addresses memory.
bool find_blocks(Exec& e, const Attention& a) {
    if (e.blocks_for == a.lens) return true;
    e.num_blocks = e.num_segments = 0;
    int64_t covered = 0;
    for (int64_t r = 0; r < a.rows; r++) {
        const int64_t first = a.starts[r], count = a.lens[r], context = a.contexts[r];
        if (first < 0 || count < 0 || first + count > a.step_tokens || (covered += count) > a.step_tokens)
            return e.fail("attention: row %lld has tokens %lld to %lld, expected within %lld and none twice",
                          static_cast<long long>(r), static_cast<long long>(first),
                          static_cast<long long>(first + count), static_cast<long long>(a.step_tokens));
        if (count == 0) continue;
        if (context < count || context > a.width * a.kv.block_size)
            return e.fail("attention: context_lens[%lld]: expected %lld to %lld, got %lld",
                          static_cast<long long>(r), static_cast<long long>(count),
                          static_cast<long long>(a.width * a.kv.block_size), static_cast<long long>(context));
        for (int64_t b = 0; b * a.kv.block_size < context; b++) {
            const int64_t page = a.table[r * a.width + b];
            if (page < 0 || page >= a.pages)
                return e.fail("attention: block_table[%lld, %lld]: expected 0 to %lld, got %lld",
                              static_cast<long long>(r), static_cast<long long>(b),
                              static_cast<long long>(a.pages - 1), static_cast<long long>(page));
        }
        for (int64_t t = 0; t < count; t += a.tokens) {
            const int64_t n = std::min(a.tokens, count - t), seen = context - (count - t - n);
            e.blocks[static_cast<size_t>(e.num_blocks++)] = {r, first + t, n, seen, e.num_segments};
            e.num_segments += (seen + kSegment - 1) / kSegment;
        }
    }
    e.blocks_for = a.lens;
    return true;
}

}  // namespace

bool plan_attention(Exec& e, const Instr& in) {
    const Attention a = attention_of(in);
    if (!find_blocks(e, a)) return false;
    const int64_t units = e.num_blocks * a.columns();
    // A split costs a second phase; either way segments merge in the same order and the result is the same.
    const bool split = units < 2 * e.pool->threads() && e.num_segments > 2 * e.num_blocks;
    if (split && e.num_segments * a.columns() <= e.limits.segments) {
        e.add_phase(in, run_segment, e.num_segments * a.columns());
        e.add_phase(in, run_merge, units);
    } else {
        e.add_phase(in, run_whole, units);
    }
    return true;
}

}  // namespace pega
