// What modules show of a unit after a forward that reshards it to a smaller group: DTensors of this
// rank's slices, which lie in memory of the engine's while they are shown.
#ifndef FC_BIND_FSDP_SLICES_H
#define FC_BIND_FSDP_SLICES_H

#include "bind/fsdp/parameters.h"

#include <vector>

namespace fc {

class Slices {
public:
    explicit Slices(const std::vector<Param> &params);
    ~Slices();
    Slices(const Slices &) = delete;
    Slices &operator=(const Slices &) = delete;

    PyObject *object(size_t i) const { return slices_[i].kept.object.get(); }
    // They show `memory`, and are trained as the shards are.
    void show(const std::vector<Param> &params, char *memory);
    // What was changed on a slice counts for the shard.
    void carry_requires_grad(const std::vector<Param> &params) const;
    // Whether it was written since it is shown, or could have been, uncounted.
    bool is_written(size_t i) const;
    // They show nothing. False: somebody keeps one, which has a copy now, and none can be reused.
    bool hide();

private:
    struct Slice {
        Reused kept;
        size_t at, bytes; // in the memory that is shown
        size_t storage_uses;
        uint32_t versions; // when it was shown
        bool is_trained;

        uint32_t count_versions() const;
        bool is_free() const;
    };

    std::vector<Slice> slices_;
};

} // namespace fc

#endif
