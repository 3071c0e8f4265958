// SPDX-License-Identifier: Apache-2.0
//
// Works as PyTorch knows them, and their futures. Nobody has to wait for a work: its buffers stay until the operation
// is over, and what brings results to where they belong runs also where the work was dropped.
#pragma once

#include "tensors.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <signal.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>

namespace tutti_shim {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

inline constexpr int64_t wait_piece = 100'000'000; // nanoseconds between two looks for signals

inline int64_t nanoseconds(Milliseconds time) {
    return time.count() > 0 ? std::chrono::nanoseconds(time).count() : 0;
}

// ---- what is left behind ----

// Works that nobody holds any more, with their buffers, which the library uses until they end. Never destroyed: works
// may outlive the program's last statement.
class Left {
  public:
    void add(tutti_work *handle, Tensors &&kept) {
        std::lock_guard<std::mutex> guard(lock_);
        works_.emplace_back(handle, std::move(kept));
    }
    void sweep() {
        std::vector<Tensors> over; // freed after the lock is
        std::lock_guard<std::mutex> guard(lock_);
        for (size_t i = works_.size(); i > 0; i--) {
            auto [handle, kept] = std::move(works_.front());
            works_.pop_front();
            bool finished = false;
            if (tutti_work_test(handle, &finished) != TUTTI_OK || finished) {
                tutti_work_release(handle);
                over.push_back(std::move(kept));
            } else {
                works_.emplace_back(handle, std::move(kept));
            }
        }
    }

  private:
    std::mutex lock_;
    std::deque<std::pair<tutti_work *, Tensors>> works_;
};
inline Left &left = *new Left;

// ---- the thread of a group's futures ----

// Whether this thread completes futures, and so runs what was given to their then().
inline thread_local bool completes = false;

// A thread that signals do not disturb: the main thread hears them.
inline void start_thread(const char *name, Finish function) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread thread([name, function = std::move(function)] {
        pthread_setname_np(pthread_self(), name);
        completes = true;
        function();
    });
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    thread.detach();
}

// Runs, one after the other, what waits for works of a group, which end in that order. Started on first need; ends when
// the group does and nothing is left.
class Completer {
  public:
    static void run(const std::shared_ptr<Completer> &self, Finish function) {
        {
            std::lock_guard<std::mutex> guard(self->lock_);
            if (!self->ended_) {
                self->functions_.push_back(std::move(function));
                if (!self->started_)
                    start_thread("tutti futures", [self] { self->work(); });
                self->started_ = true;
                self->wanted_.notify_one();
                return;
            }
        }
        start_thread("tutti futures", std::move(function)); // of a group that was destroyed
    }
    void end() {
        std::lock_guard<std::mutex> guard(lock_);
        ended_ = true;
        wanted_.notify_one();
    }

  private:
    void work() {
        std::unique_lock<std::mutex> guard(lock_);
        for (;;) {
            wanted_.wait(guard, [this] { return ended_ || !functions_.empty(); });
            if (functions_.empty())
                return;
            Finish function = std::move(functions_.front());
            functions_.pop_front();
            guard.unlock();
            function();
            function = nullptr;
            guard.lock();
        }
    }

    std::mutex lock_;
    std::condition_variable wanted_;
    std::deque<Finish> functions_;
    bool started_ = false, ended_ = false;
};

// ---- a work ----

// What a call of PyTorch's is about.
struct Operation {
    c10d::OpType type;
    const char *title;    // as the profiler shows it
    Milliseconds timeout; // not positive: the group's
    bool waits;           // PyTorch would only wait for it: it is run at once
    Tensors result;
    Tensors kept; // the buffers; the first says which device
    Finish finish = nullptr;
    bool message = false; // ends in any order
};

struct Place { // what works share with their group
    int rank;
    tutti_world *world;
    pid_t process;
    std::shared_ptr<Completer> completer = std::make_shared<Completer>();
};

inline void *current_stream(c10::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

class Work : public c10d::Work {
  public:
    Work(std::shared_ptr<Place> place, Operation &&operation)
        : c10d::Work(place->rank, operation.type, operation.title, operation.kept), place_(std::move(place)),
          result_(std::move(operation.result)), kept_(std::move(operation.kept)), finish_(std::move(operation.finish)),
          message_(operation.message), device_(kept_.empty() ? c10::Device(c10::kCPU) : kept_[0].device()) {
        if (opType_ == c10d::OpType::RECV || opType_ == c10d::OpType::RECVANYSOURCE) {
            received_ = at::zeros({ static_cast<int64_t>(sizeof(tutti_received)) }, at::kByte);
            received()->size = sizeof(tutti_received);
            kept_.push_back(received_);
        }
    }

    ~Work() override {
        if (handle_ == nullptr || place_->process != getpid())
            return;
        if (finish_ && !finalizing())
            end_dropped();
        else if (over_ && !exception_)
            tutti_work_release(handle_);
        else
            left.add(handle_, std::move(kept_));
        left.sweep();
    }

    tutti_work **handle() {
        return &handle_;
    }
    // Where the library writes who has sent; nullptr where nothing is received.
    tutti_received *received() const {
        return received_.defined() ? static_cast<tutti_received *>(received_.data_ptr()) : nullptr;
    }
    const Tensors &kept() const {
        return kept_;
    }

    bool isCompleted() override {
        if (!over_ && finished()) {
            tutti_status status = tutti_work_wait(handle_, 0);
            settle(status != TUTTI_OK ? failure(status) : nullptr);
        }
        return over_;
    }
    bool isSuccess() const override {
        return const_cast<Work *>(this)->isCompleted() && c10d::Work::exception() == nullptr;
    }
    std::exception_ptr exception() const override {
        const_cast<Work *>(this)->isCompleted();
        return c10d::Work::exception();
    }
    int sourceRank() const override {
        return received_.defined() ? received()->source : -1;
    }
    uint64_t getSequencenumber() const override {
        return tutti_work_sequence(handle_);
    }
    std::vector<Tensor> result() override {
        wait(kNoTimeout);
        return result_;
    }
    void synchronize() override {
        wait(kNoTimeout);
    }

    // Waits; a failure is thrown. A timeout that runs out ends this wait alone, and the operation goes on. On a GPU the
    // current stream is ordered after the operation, and the host waits only where a timeout is given.
    bool wait(Milliseconds timeout) override {
        if (device_.is_cpu()) {
            if (!over_)
                wait_for(nanoseconds(timeout));
        } else {
            if (timeout.count() > 0)
                check(call(place_->world, [&] { return tutti_work_wait(handle_, nanoseconds(timeout)); }));
            join();
        }
        if (std::exception_ptr error = c10d::Work::exception())
            std::rethrow_exception(error);
        return true;
    }

    // Completes by itself: a thread of the group's waits for it. On a GPU it is complete at once, and who waits for it
    // has its stream ordered after the operation.
    c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
        Unlocked unlocked;
        std::lock_guard<std::mutex> guard(asking_);
        if (future_)
            return future_;
        auto type = c10::ListType::create(c10::TensorType::get());
        if (!device_.is_cpu()) {
            future_ = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{ device_ });
            c10::StreamGuard side(c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_));
            join();
            future_->markCompleted(c10::IValue(result_));
            return future_;
        }
        future_ = c10::make_intrusive<c10::ivalue::Future>(type);
        auto self = c10::intrusive_ptr<Work>::reclaim_copy(this);
        auto complete = [self] { self->complete(); };
        if (over_)
            complete();
        else if (message_ || completes) // whoever asks there may wait for it, as PyTorch's PowerSGD does
            start_thread("tutti message", complete);
        else
            Completer::run(place_->completer, complete);
        return future_;
    }

  private:
    bool finished() const {
        bool finished = false;
        return tutti_work_test(handle_, &finished) != TUTTI_OK || finished;
    }

    // The operation has ended. The first who notices it does what is left to do. The last reference to a tensor that
    // Python knows takes the interpreter's lock: nobody waits here with it, as PyTorch's is_completed would.
    void settle(std::exception_ptr error) {
        Unlocked unlocked;
        std::lock_guard<std::mutex> guard(settling_);
        if (over_)
            return;
        if (error == nullptr && finish_) {
            try {
                finish_();
            } catch (...) {
                error = std::current_exception();
            }
        }
        if (error == nullptr)
            let_go();
        finish_ = nullptr;
        c10d::Work::finish(error);
        over_ = true;
    }

    // Of the buffers. PyTorch's allocator gives memory of a GPU back to the stream that it was asked for in; the
    // current stream, which is ordered after the operation, may be another, and must be waited for.
    void let_go() {
        if (!device_.is_cpu()) {
            const c10::Stream stream = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
            for (const Tensor &tensor : kept_) {
                if (tensor.defined() && !tensor.is_cpu())
                    tensor.record_stream(stream);
            }
        }
        kept_.clear();
    }

    // What a wait has found. A deadline of the wait alone, and an interruption, leave the operation running, and the
    // library writes into its buffers: they are returned, and not noted.
    std::exception_ptr outcome(tutti_status status) {
        std::exception_ptr error = status != TUTTI_OK ? failure(status) : nullptr;
        if (status != TUTTI_OK && finished()) {
            status = tutti_work_wait(handle_, 0); // how it has ended, and not how the wait has
            error = status != TUTTI_OK ? failure(status) : nullptr;
        } else if (status == TUTTI_ERROR_TIMEOUT || status == TUTTI_ERROR_INTERRUPTED) {
            return error;
        }
        settle(error);
        return nullptr;
    }

    void wait_for(int64_t limit) {
        bool in_pieces =
            on_main_thread() && !finished() && !interrupt_raises(); // a handler of the program's runs between them
        const auto end = Clock::now() + std::chrono::nanoseconds(limit);
        for (;;) {
            int64_t rest = limit > 0 ? std::max<int64_t>(1, std::chrono::nanoseconds(end - Clock::now()).count()) : 0;
            bool cut = in_pieces && (rest == 0 || rest > wait_piece);
            tutti_status status =
                call(place_->world, [&] { return tutti_work_wait(handle_, cut ? wait_piece : rest); });
            if (status == TUTTI_ERROR_INTERRUPTED)
                hear_signals();
            if (cut && status == TUTTI_ERROR_TIMEOUT && !finished()) {
                hear_signals();
                continue;
            }
            if (std::exception_ptr error = outcome(status))
                std::rethrow_exception(error);
            return;
        }
    }

    // Where Ctrl-C has ended the wait of the main thread, and with it all waits of this world, it waits again.
    void wait_always() {
        Unlocked unlocked;
        while (!over_ && outcome(tutti_work_wait(handle_, 0)) != nullptr)
            std::this_thread::sleep_for(Milliseconds(10));
    }

    void complete() {
        wait_always();
        if (std::exception_ptr error = c10d::Work::exception())
            future_->setError(error);
        else
            future_->markCompleted(c10::IValue(result_));
    }

    // Orders the current stream after the operation. What is left to do with its results is put into the first stream
    // that comes.
    void join() {
        check(tutti_work_join(handle_, current_stream(device_)));
        settle(nullptr);
    }

    // Nobody holds it, and its results belong somewhere: another object takes it over until it has ended.
    void end_dropped() {
        auto heir = c10::make_intrusive<Work>(
            place_, Operation{ opType_, nullptr, Milliseconds(0), false, {}, std::move(kept_), std::move(finish_) });
        std::swap(heir->handle_, handle_);
        finish_ = nullptr;
        if (!device_.is_cpu()) {
            if (tutti_work_join(heir->handle_, current_stream(device_)) == TUTTI_OK)
                heir->settle(nullptr);
            else // it has failed, which the group's next call says; a destructor throws nothing
                heir->finish_ = nullptr;
        } else if (message_)
            start_thread("tutti message", [heir] { heir->wait_always(); });
        else
            Completer::run(place_->completer, [heir] { heir->wait_always(); });
    }

    std::shared_ptr<Place> place_;
    tutti_work *handle_ = nullptr;
    Tensors result_, kept_;
    Tensor received_; // among the buffers, too: the library writes it when the message comes, and the work may be gone
    Finish finish_;
    bool message_;
    c10::Device device_;
    std::mutex settling_, asking_;
    std::atomic<bool> over_{ false };
    c10::intrusive_ptr<c10::ivalue::Future> future_;
};

} // namespace tutti_shim
