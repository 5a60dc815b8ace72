/* `_C.Beats`: signs of life (comm/beats.h) in the store of a process group. */
#include "comm/beats.h"
#include "base/clock.h"
#include "bind/module.h"
#include "bind/python/objects.h"
#include "libtorch/process_group.h"

namespace fc {

namespace {

struct Beats {
    explicit Beats(Fields &given)
    {
        const std::string group = given.text("group");
        const int rank = given.integer("rank");
        given.end();
        const fc_beats_ops ops = group_beats(group);
        check(fc_beats_start(&ops, rank, 0, &core));
    }
    ~Beats()
    {
        const NoGil no_gil;
        fc_beats_stop(core);
    }

    fc_beats *core = nullptr;
};

double seconds_since(int64_t ns)
{
    return (double)(fc_now_ns() - ns) / (double)FC_NS_PER_S;
}

Ref beats_heard(Beats &self, PyObject *rank)
{
    const fc_beat found = fc_beats_heard(self.core, integer_from(rank));
    const char *words = std::strchr(found.words, ' '); // behind their number
    return found.at_ns == 0 ? Ref::borrow(Py_None)
                            : checked(Py_BuildValue("(sd)", words != nullptr ? words + 1 : "",
                                                    seconds_since(found.at_ns)));
}

PyMethodDef beats_methods[] = {
    method<[](Beats &self, PyObject *words) { fc_beats_say(self.core, text_from(words)); }>("say"),
    method<[](Beats &self, Fields &given) {
        const auto ranks = given.values<integer_from>("ranks");
        given.end();
        return fc_beats_want(self.core, ranks.data(), ranks.size());
    }>("want"),
    method<beats_heard>("heard"),
    method<[](Beats &self) { return seconds_since(fc_beats_answered_ns(self.core)); }>("answered"),
    {},
};

} // namespace

int register_beats(PyObject *module)
{
    return add_type<Beats>(module, {.name = "fsdp_c._C.Beats", .methods = beats_methods});
}

} // namespace fc
