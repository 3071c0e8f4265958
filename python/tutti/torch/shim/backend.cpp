// SPDX-License-Identifier: Apache-2.0
//
// PyTorch's calls as Tutti's, in C++: a c10d::Backend that gives what the Python way gives (tutti/torch/group.py), at
// less cost, and that can share a process group with others ("cpu:tutti,cuda:gloo"). Opening and ending a group is
// Python's: `member` is the object that does it.
#include "work.hpp"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace tutti_shim {

using Lists = std::vector<Tensors>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

class Backend : public c10d::Backend {
  public:
    Backend(py::object member, int rank, int size, uintptr_t world, uintptr_t group,
            c10::intrusive_ptr<Options> options)
        : c10d::Backend(rank, size), member_(std::move(member)), group_(reinterpret_cast<tutti_group *>(group)),
          place_(std::make_shared<Place>(Place{ rank, reinterpret_cast<tutti_world *>(world), getpid() })),
          options_(std::move(options)) {
        init();
    }

    ~Backend() override {
        place_->completer->end();
        if (finalizing()) {
            member_.release();
        } else {
            py::gil_scoped_acquire lock;
            member_ = py::object();
        }
    }

    // ---- what PyTorch asks a group ----

    const std::string getBackendName() const override {
        return "tutti";
    }
    c10::intrusive_ptr<Options> getBackendOptions() override {
        return options_;
    }
    py::object member() const {
        return member_;
    }
    py::object options() const {
        return member_.attr("options"); // with its methods in Python
    }

    // ---- parts of it (dist.split_group, and DeviceMesh where the ranks have a device) ----

    bool supportsSplitting() const override {
        return true;
    }
    // All ranks of the group come here, and those of the part alone make it. PyTorch asks once for each device, and one
    // backend is for all of them.
    c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store> & /* the member has one */,
                                            const std::vector<int> &ranks,
                                            const c10::intrusive_ptr<Options> &options) override {
        py::gil_scoped_acquire lock;
        auto last = part_.lock();
        if (last != nullptr && part_name_ == options->group_name)
            return last;
        try {
            double seconds = std::chrono::duration<double>(options->timeout).count();
            py::object made =
                py::reinterpret_borrow<py::object>(package.split)(member_, ranks, options->group_name, seconds);
            if (made.is_none())
                return nullptr;
            auto part = made.cast<c10::intrusive_ptr<c10d::Backend>>();
            part_ = c10::weak_intrusive_ptr<c10d::Backend>(part);
            part_name_ = options->group_name;
            return part;
        } catch (py::error_already_set &error) {
            error.restore();
            std::rethrow_exception(python_failure());
        }
    }
    void setSequenceNumberForGroup() override {} // the library counts by itself
    uint64_t getSequenceNumberForGroup() override {
        return tutti_group_sequence(group()); // begun: works that run end earlier on one rank than on another
    }
    void setTimeout(Milliseconds timeout) override {
        check(tutti_group_set_timeout(group(), nanoseconds(timeout)));
        options_->timeout = timeout;
    }
    c10d::ErrorType getError() override {
        switch (tutti_group_check(group())) {
        case TUTTI_OK:
            return c10d::ErrorType::SUCCESS;
        case TUTTI_ERROR_TIMEOUT:
            return c10d::ErrorType::TIMEOUT;
        case TUTTI_ERROR_ABORTED:
            return c10d::ErrorType::REMOTE_ERROR;
        default:
            return c10d::ErrorType::COMM_ERROR;
        }
    }

    // Leaves. Others may go on without this rank as long as they do not need it.
    void shutdown() override {
        if (group_.exchange(nullptr) != nullptr)
            ask("shutdown");
        place_->completer->end();
    }
    // Ends what runs, and what comes, on all ranks of the group.
    void abort() override {
        ask("abort");
    }

    // ---- collectives ----

    WorkPointer allreduce(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        const Tensor &tensor = only(tensors, "all_reduce");
        tutti_dtype dtype = number(tensor, "all_reduce");
        Reduction how = reduction(options.reduceOp, tensor, "all_reduce");
        auto [target, finish] = writable(tensor);
        void *data = target.data_ptr();
        size_t count = count_of(target);
        return run(
            [=](tutti_group *group, tutti_call *call) {
                return tutti_all_reduce(group, data, data, count, dtype, how.of(call), call);
            },
            { c10d::OpType::ALLREDUCE,
              "tutti:all_reduce",
              options.timeout,
              !options.asyncOp,
              tensors,
              { target },
              finish });
    }

    WorkPointer allreduce_sparse(Tensors &tensors, const c10d::AllreduceOptions &options) override {
        return allreduce(tensors, options); // which refuses it
    }

    WorkPointer allreduce_coalesced(Tensors &tensors, const c10d::AllreduceCoalescedOptions &options) override {
        Several several;
        for (const Tensor &tensor : tensors) {
            tutti_dtype dtype = number(tensor, "all_reduce");
            Reduction how = reduction(options.reduceOp, tensor, "all_reduce");
            auto [target, finish] = writable(tensor);
            void *data = target.data_ptr();
            size_t count = count_of(target);
            several.add(
                [=](tutti_group *group, tutti_call *call) {
                    return tutti_all_reduce(group, data, data, count, dtype, how.of(call), call);
                },
                { target }, finish);
        }
        return run_several(several, "tutti:all_reduce_coalesced", options.timeout, !options.asyncOp, tensors);
    }

    WorkPointer broadcast(Tensors &tensors, const c10d::BroadcastOptions &options) override {
        const Tensor &tensor = only(tensors, "broadcast");
        tutti_dtype dtype = number(tensor, "broadcast");
        auto [target, finish] = writable(tensor);
        void *data = target.data_ptr();
        size_t count = count_of(target);
        int root = static_cast<int>(options.rootRank);
        return run([=](tutti_group *group,
                       tutti_call *call) { return tutti_broadcast(group, data, data, count, dtype, root, call); },
                   { c10d::OpType::BROADCAST,
                     "tutti:broadcast",
                     options.timeout,
                     !options.asyncOp,
                     tensors,
                     { target },
                     finish });
    }

    WorkPointer reduce(Tensors &tensors, const c10d::ReduceOptions &options) override {
        const Tensor &tensor = only(tensors, "reduce");
        tutti_dtype dtype = number(tensor, "reduce");
        Reduction how = reduction(options.reduceOp, tensor, "reduce");
        auto [target, finish] = writable(tensor);
        void *data = target.data_ptr();
        size_t count = count_of(target);
        int root = static_cast<int>(options.rootRank);
        return run(
            [=](tutti_group *group, tutti_call *call) {
                return tutti_reduce(group, data, data, count, dtype, how.of(call), root, call);
            },
            { c10d::OpType::REDUCE, "tutti:reduce", options.timeout, !options.asyncOp, tensors, { target }, finish });
    }

    WorkPointer allgather(Lists &lists, Tensors &inputs, const c10d::AllgatherOptions &options) override {
        Tensors &outputs = only(lists, "all_gather");
        Tensor source = dense(only(inputs, "all_gather"));
        TORCH_CHECK_VALUE(outputs.size() == ranks(), "tutti: all_gather wants ", size_,
                          " tensors to gather into, and was given ", outputs.size());
        tutti_dtype dtype = alike(source, outputs, "all_gather");
        std::vector<size_t> counts = counts_of(outputs);
        size_t own = counts[static_cast<size_t>(rank_)], given = count_of(source);
        TORCH_CHECK_VALUE(own == given, "tutti: all_gather: rank ", rank_, " gives ", given, " elements, and gathers ",
                          own, " of itself");
        Tensor all = at::empty({ sum(counts) }, source.options());
        const void *from = source.const_data_ptr();
        void *to = all.data_ptr();
        bool even = all_equal(counts);
        return run(
            [=](tutti_group *group, tutti_call *call) {
                return even ? tutti_all_gather(group, from, to, given, dtype, call)
                            : tutti_all_gather_v(group, from, to, counts.data(), nullptr, dtype, call);
            },
            { c10d::OpType::ALLGATHER,
              "tutti:all_gather",
              options.timeout,
              !options.asyncOp,
              outputs,
              { source, all },
              copies(all, outputs) });
    }

    WorkPointer _allgather_base(Tensor &output, Tensor &input, const c10d::AllgatherOptions &options) override {
        Several one;
        add_gather(one, output, input);
        return run(std::move(one.calls[0]), { c10d::OpType::_ALLGATHER_BASE,
                                              "tutti:_all_gather_base",
                                              options.timeout,
                                              !options.asyncOp,
                                              { output },
                                              std::move(one.kept),
                                              one.finish() });
    }

    WorkPointer allgather_into_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                const c10d::AllgatherOptions &options) override {
        same_number(outputs, inputs, "all_gather_into_tensor_coalesced");
        Several several;
        for (size_t i = 0; i < inputs.size(); i++)
            add_gather(several, outputs[i], inputs[i]);
        return run_several(several, "tutti:all_gather_into_tensor_coalesced", options.timeout, !options.asyncOp,
                           outputs);
    }

    WorkPointer allgather_coalesced(Lists &lists, Tensors &inputs, const c10d::AllgatherOptions &options) override {
        TORCH_CHECK_VALUE(lists.size() == ranks(), "tutti: all_gather_coalesced wants a list of outputs for each of ",
                          size_, " ranks, and was given ", lists.size());
        Tensors result;
        for (const Tensors &list : lists) {
            TORCH_CHECK_VALUE(list.size() == inputs.size(),
                              "tutti: all_gather_coalesced wants as many outputs of each rank as there are inputs");
            result.insert(result.end(), list.begin(), list.end());
        }
        Several several;
        for (size_t i = 0; i < inputs.size(); i++) {
            Tensors parts;
            for (const Tensors &list : lists) {
                TORCH_CHECK_VALUE(list[i].numel() == inputs[i].numel(), "tutti: all_gather_coalesced: input ", i,
                                  " has ", inputs[i].numel(), " elements, and one of its outputs ", list[i].numel());
                parts.push_back(list[i]);
            }
            (void)alike(inputs[i], parts, "all_gather_coalesced");
            Tensor all = at::empty({ inputs[i].numel() * size_ }, inputs[i].options());
            add_gather(several, all, inputs[i]);
            several.finishes.push_back(copies(all, parts));
        }
        return run_several(several, "tutti:all_gather_coalesced", options.timeout, !options.asyncOp, result);
    }

    WorkPointer _reduce_scatter_base(Tensor &output, Tensor &input,
                                     const c10d::ReduceScatterOptions &options) override {
        Several one;
        add_scatter(one, output, input, options.reduceOp);
        return run(std::move(one.calls[0]), { c10d::OpType::_REDUCE_SCATTER_BASE,
                                              "tutti:_reduce_scatter_base",
                                              options.timeout,
                                              !options.asyncOp,
                                              { output },
                                              std::move(one.kept),
                                              one.finish() });
    }

    WorkPointer reduce_scatter_tensor_coalesced(Tensors &outputs, Tensors &inputs,
                                                const c10d::ReduceScatterOptions &options) override {
        same_number(outputs, inputs, "reduce_scatter_tensor_coalesced");
        Several several;
        for (size_t i = 0; i < inputs.size(); i++)
            add_scatter(several, outputs[i], inputs[i], options.reduceOp);
        return run_several(several, "tutti:reduce_scatter_tensor_coalesced", options.timeout, !options.asyncOp,
                           outputs);
    }

    WorkPointer reduce_scatter(Tensors &outputs, Lists &lists, const c10d::ReduceScatterOptions &options) override {
        const Tensor &output = only(outputs, "reduce_scatter");
        Tensors &inputs = only(lists, "reduce_scatter");
        TORCH_CHECK_VALUE(inputs.size() == ranks(), "tutti: reduce_scatter wants ", size_, " tensors, and was given ",
                          inputs.size());
        tutti_dtype dtype = alike(output, inputs, "reduce_scatter");
        Reduction how = reduction(options.reduceOp, output, "reduce_scatter");
        std::vector<size_t> counts = counts_of(inputs);
        auto [target, finish] = writable(output);
        size_t own = counts[static_cast<size_t>(rank_)], wanted = count_of(target);
        TORCH_CHECK_VALUE(own == wanted, "tutti: reduce_scatter: the part of rank ", rank_, " has ", own,
                          " elements, and its output ", wanted);
        Tensor all = flat(inputs);
        const void *from = all.const_data_ptr();
        void *to = target.data_ptr();
        bool even = all_equal(counts);
        return run(
            [=](tutti_group *group, tutti_call *call) {
                return even ? tutti_reduce_scatter(group, from, to, own, dtype, how.of(call), call)
                            : tutti_reduce_scatter_v(group, from, to, counts.data(), dtype, how.of(call), call);
            },
            { c10d::OpType::REDUCE_SCATTER,
              "tutti:reduce_scatter",
              options.timeout,
              !options.asyncOp,
              outputs,
              { target, all },
              finish });
    }

    WorkPointer gather(Lists &lists, Tensors &inputs, const c10d::GatherOptions &options) override {
        Tensor source = dense(only(inputs, "gather"));
        int root = static_cast<int>(options.rootRank);
        tutti_dtype dtype = number(source, "gather");
        Tensor all;
        Tensors outputs;
        Finish finish;
        if (rank_ == root) {
            outputs = only(lists, "gather");
            bool fits = outputs.size() == ranks();
            for (const Tensor &tensor : outputs)
                fits = fits && tensor.numel() == source.numel();
            TORCH_CHECK_VALUE(fits, "tutti: gather wants ", size_, " tensors of ", source.numel(),
                              " elements on its root");
            (void)alike(source, outputs, "gather");
            all = at::empty({ source.numel() * size_ }, source.options());
            finish = copies(all, outputs);
        }
        const void *from = source.const_data_ptr();
        void *to = all.defined() ? all.data_ptr() : nullptr;
        size_t count = count_of(source);
        return run([=](tutti_group *group,
                       tutti_call *call) { return tutti_gather(group, from, to, count, dtype, root, call); },
                   { c10d::OpType::GATHER,
                     "tutti:gather",
                     options.timeout,
                     !options.asyncOp,
                     outputs,
                     { source, all },
                     finish });
    }

    WorkPointer scatter(Tensors &outputs, Lists &lists, const c10d::ScatterOptions &options) override {
        const Tensor &output = only(outputs, "scatter");
        tutti_dtype dtype = number(output, "scatter");
        int root = static_cast<int>(options.rootRank);
        auto [target, finish] = writable(output);
        Tensor all;
        if (rank_ == root) {
            Tensors &inputs = only(lists, "scatter");
            bool fits = inputs.size() == ranks();
            for (const Tensor &tensor : inputs)
                fits = fits && tensor.numel() == target.numel();
            TORCH_CHECK_VALUE(fits, "tutti: scatter wants ", size_, " tensors of ", target.numel(),
                              " elements on its root");
            (void)alike(output, inputs, "scatter");
            all = flat(inputs);
        }
        const void *from = all.defined() ? all.const_data_ptr() : nullptr;
        void *to = target.data_ptr();
        size_t count = count_of(target);
        return run([=](tutti_group *group,
                       tutti_call *call) { return tutti_scatter(group, from, to, count, dtype, root, call); },
                   { c10d::OpType::SCATTER,
                     "tutti:scatter",
                     options.timeout,
                     !options.asyncOp,
                     outputs,
                     { target, all },
                     finish });
    }

    WorkPointer alltoall(Tensors &outputs, Tensors &inputs, const c10d::AllToAllOptions &options) override {
        TORCH_CHECK_VALUE(outputs.size() == ranks() && inputs.size() == ranks(), "tutti: all_to_all wants ", size_,
                          " tensors to send and as many to receive");
        (void)alike(inputs[0], inputs, "all_to_all");
        (void)alike(inputs[0], outputs, "all_to_all");
        std::vector<size_t> received = counts_of(outputs);
        Tensor source = flat(inputs), all = at::empty({ sum(received) }, source.options());
        return exchange(source, counts_of(inputs), all, received, options, "tutti:all_to_all", outputs,
                        copies(all, outputs));
    }

    WorkPointer alltoall_base(Tensor &output, Tensor &input, std::vector<int64_t> &output_splits,
                              std::vector<int64_t> &input_splits, const c10d::AllToAllOptions &options) override {
        Tensor source = dense(input);
        auto [target, finish] = writable(output);
        return exchange(source, splits(source, input_splits, "input"), target, splits(target, output_splits, "output"),
                        options, "tutti:all_to_all", { output }, finish);
    }

    WorkPointer barrier(const c10d::BarrierOptions &options) override {
        return run([](tutti_group *group, tutti_call *call) { return tutti_barrier(group, call); },
                   { c10d::OpType::BARRIER, "tutti:barrier", options.timeout, !options.asyncOp, {}, {} });
    }

    // A barrier whose failure names those who did not come. The library's names all of them, in every collective.
    void monitoredBarrier(const c10d::BarrierOptions &options, bool /* all */) override {
        c10d::BarrierOptions now = options;
        now.asyncOp = false;
        (void)barrier(now);
    }

    // ---- from one to another ----

    WorkPointer send(Tensors &tensors, int to, int tag) override {
        Tensor source = dense(only(tensors, "send"));
        tutti_dtype dtype = number(source, "send");
        const void *from = source.const_data_ptr();
        size_t count = count_of(source);
        return run(
            [=](tutti_group *group, tutti_call *call) { return tutti_send(group, from, count, dtype, to, tag, call); },
            { c10d::OpType::SEND, "tutti:send", Milliseconds(0), false, tensors, { source }, nullptr, true });
    }
    WorkPointer recv(Tensors &tensors, int from, int tag) override {
        return receive(tensors, from, tag, c10d::OpType::RECV);
    }
    WorkPointer recvAnysource(Tensors &tensors, int tag) override {
        return receive(tensors, TUTTI_ANY_SOURCE, tag, c10d::OpType::RECVANYSOURCE);
    }

  private:
    using Call = std::function<tutti_status(tutti_group *, tutti_call *)>;

    struct Batch { // what an exception finds begun is forgotten
        tutti_batch *handle = nullptr;
        ~Batch() {
            if (handle != nullptr)
                tutti_batch_cancel(handle);
        }
    };

    struct Several { // collectives as one operation
        std::vector<Call> calls;
        Tensors kept;
        std::vector<Finish> finishes;

        void add(Call call, const Tensors &buffers, const Finish &finish) {
            calls.push_back(std::move(call));
            kept.insert(kept.end(), buffers.begin(), buffers.end());
            if (finish)
                finishes.push_back(finish);
        }
        Finish finish() {
            if (finishes.size() <= 1)
                return finishes.empty() ? nullptr : finishes[0];
            return [all = finishes] {
                for (const Finish &each : all)
                    each();
            };
        }
    };

    static void same_number(const Tensors &outputs, const Tensors &inputs, const char *who) {
        TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "tutti: ", who,
                          " wants as many outputs as inputs, and was given ", outputs.size(), " and ", inputs.size());
    }

    size_t ranks() const {
        return static_cast<size_t>(size_);
    }

    tutti_group *group() const {
        tutti_group *group = group_;
        TORCH_CHECK_WITH(DistBackendError, group != nullptr, "tutti: this process group was destroyed");
        return group;
    }

    void ask(const char *method) {
        py::gil_scoped_acquire lock;
        try {
            member_.attr(method)();
        } catch (py::error_already_set &error) {
            error.restore();
            std::rethrow_exception(python_failure());
        }
    }

    // Runs a collective now and returns nothing where PyTorch would only wait for it, else starts it. On a GPU both
    // only enqueue it.
    template <class Function> WorkPointer run(Function &&function, Operation &&operation) {
        tutti_group *group = this->group();
        tutti_call call{};
        call.size = sizeof call;
        call.timeout_ns = nanoseconds(operation.timeout);
        if (!operation.kept.empty() && operation.kept[0].is_cuda())
            place(call, operation.kept[0].device());
        if (operation.waits) {
            RECORD_FUNCTION(operation.title, std::vector<c10::IValue>(operation.kept.begin(), operation.kept.end()));
            check(tutti_shim::call(place_->world, [&] { return function(group, &call); }));
            if (operation.finish)
                operation.finish();
            return nullptr;
        }
        left.sweep();
        auto work = c10::make_intrusive<Work>(place_, std::move(operation));
        call.work = work->handle();
        call.received = work->received();
        check(tutti_shim::call(place_->world, [&] { return function(group, &call); }));
        return work;
    }

    WorkPointer run_several(Several &several, const char *title, Milliseconds timeout, bool waits,
                            const Tensors &result) {
        Batch batch;
        tutti_group *group = this->group();
        check(tutti_batch_begin(group, &batch.handle));
        tutti_call noted{};
        noted.size = sizeof noted;
        noted.batch = batch.handle;
        if (!several.kept.empty() && several.kept[0].is_cuda())
            place(noted, several.kept[0].device());
        for (const Call &each : several.calls)
            check(each(group, &noted));
        return run(
            [&batch](tutti_group *, tutti_call *call) {
                return tutti_batch_end(std::exchange(batch.handle, nullptr), call);
            },
            { c10d::OpType::COALESCED, title, timeout, waits, result, std::move(several.kept), several.finish() });
    }

    // Says where the buffers of a call lie, and after what it comes.
    static void place(tutti_call &call, c10::Device device) {
        call.stream = current_stream(device);
        call.device = static_cast<tutti_device>(TUTTI_CUDA + 1 + device.index());
    }

    void add_gather(Several &several, const Tensor &output, const Tensor &input) {
        Tensor source = dense(input);
        tutti_dtype dtype = alike(source, { output }, "all_gather");
        auto [target, finish] = writable(output);
        TORCH_CHECK_VALUE(target.numel() == source.numel() * size_, "tutti: all_gather of ", source.numel(),
                          " elements by ", size_, " ranks needs a tensor of ", source.numel() * size_,
                          ", and was given one of ", target.numel());
        const void *from = source.const_data_ptr();
        void *to = target.data_ptr();
        size_t count = count_of(source);
        several.add(
            [=](tutti_group *group, tutti_call *call) { return tutti_all_gather(group, from, to, count, dtype, call); },
            { target, source }, finish);
    }

    void add_scatter(Several &several, const Tensor &output, const Tensor &input, const c10d::ReduceOp &operation) {
        Tensor source = dense(input);
        tutti_dtype dtype = alike(source, { output }, "reduce_scatter");
        Reduction how = reduction(operation, source, "reduce_scatter");
        auto [target, finish] = writable(output);
        TORCH_CHECK_VALUE(source.numel() == target.numel() * size_, "tutti: reduce_scatter of ", source.numel(),
                          " elements among ", size_, " ranks leaves each ", static_cast<double>(source.numel()) / size_,
                          ", and the output has ", target.numel());
        const void *from = source.const_data_ptr();
        void *to = target.data_ptr();
        size_t count = count_of(target);
        several.add(
            [=](tutti_group *group, tutti_call *call) {
                return tutti_reduce_scatter(group, from, to, count, dtype, how.of(call), call);
            },
            { target, source }, finish);
    }

    std::vector<size_t> splits(const Tensor &tensor, const std::vector<int64_t> &sizes, const char *what) const {
        int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1, total = 0;
        if (sizes.empty())
            TORCH_CHECK_VALUE(rows % size_ == 0, "tutti: all_to_all: ", rows, " rows of the ", what,
                              " cannot be cut into ", size_, " parts");
        std::vector<int64_t> chosen = sizes.empty() ? std::vector<int64_t>(ranks(), rows / size_) : sizes;
        int64_t width = rows > 0 ? tensor.numel() / rows : 0;
        std::vector<size_t> counts;
        bool fits = chosen.size() == ranks();
        for (int64_t size : chosen) {
            fits = fits && size >= 0;
            total += size;
            counts.push_back(static_cast<size_t>(size * width));
        }
        TORCH_CHECK_VALUE(fits && total == rows, "tutti: all_to_all: the ", what, " has ", rows,
                          " rows, and its splits are ", chosen);
        return counts;
    }

    WorkPointer exchange(const Tensor &source, std::vector<size_t> sent, const Tensor &target,
                         std::vector<size_t> received, const c10d::AllToAllOptions &options, const char *title,
                         const Tensors &result, const Finish &finish) {
        tutti_dtype dtype = alike(source, { target }, "all_to_all");
        const void *from = source.const_data_ptr();
        void *to = target.data_ptr();
        return run(
            [=](tutti_group *group, tutti_call *call) {
                return tutti_all_to_all_v(group, from, sent.data(), nullptr, to, received.data(), nullptr, dtype, call);
            },
            { c10d::OpType::ALLTOALL_BASE,
              title,
              options.timeout,
              !options.asyncOp,
              result,
              { target, source },
              finish });
    }

    WorkPointer receive(Tensors &tensors, int source, int tag, c10d::OpType type) {
        const Tensor &tensor = only(tensors, "recv");
        tutti_dtype dtype = number(tensor, "recv");
        auto [target, finish] = writable(tensor);
        void *to = target.data_ptr();
        size_t count = count_of(target);
        return run([=](tutti_group *group,
                       tutti_call *call) { return tutti_recv(group, to, count, dtype, source, tag, call); },
                   { type, "tutti:recv", Milliseconds(0), false, tensors, { target }, finish, true });
    }

    py::object member_;
    std::atomic<tutti_group *> group_;
    std::shared_ptr<Place> place_;
    c10::intrusive_ptr<Options> options_;
    // The last part that was split off.
    c10::weak_intrusive_ptr<c10d::Backend> part_{ c10::intrusive_ptr<c10d::Backend>() };
    std::string part_name_;
};

} // namespace tutti_shim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    namespace py = pybind11;
    using tutti_shim::Backend;
    py::module_::import("torch._C._distributed_c10d");
    py::class_<Backend, c10d::Backend, c10::intrusive_ptr<Backend>>(
        module, "Backend", "A group of ranks, for the devices that PyTorch registers it for.")
        .def(py::init([](py::object member, int rank, int size, uintptr_t world, uintptr_t group,
                         c10::intrusive_ptr<c10d::Backend::Options> options) {
            return c10::make_intrusive<Backend>(std::move(member), rank, size, world, group, std::move(options));
        }))
        .def_property_readonly("member", &Backend::member, "Who opened it: tutti.torch.member.Member.")
        .def_property_readonly("options", &Backend::options, "With what it was made: tutti.torch.member.Options.")
        .def(
            "perform_nocolor_split", [](const Backend &, const py::object &) {},
            "What a rank does that is not in a part: nothing.");
    module.def("inside", &tutti_shim::inside,
               "The number of the call of this module that the main thread is in, or 0.");
    module.def("interrupt", &tutti_shim::interrupt, "Ends that call, if the main thread is still in it.");
    module.def("set_up", [](const py::object &failure, const py::object &raises, const py::object &hear,
                            const py::object &split, long main_thread, bool devices) {
        tutti_shim::package = { failure.inc_ref().ptr(), raises.inc_ref().ptr(), hear.inc_ref().ptr(),
                                split.inc_ref().ptr(), main_thread };
        tutti_shim::devices_too = devices;
    });
    module.def(
        "listen", [](int descriptor) { tutti_shim::package.signals = descriptor; },
        "The descriptor at which signals are heard.");
}
