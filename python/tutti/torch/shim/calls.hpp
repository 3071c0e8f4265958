// SPDX-License-Identifier: Apache-2.0
//
// Calls of the C library: without the interpreter's lock, with failures as the exceptions that the Python way has, and
// so that Ctrl-C ends those in which the main thread waits. As in tutti/_interrupt.py, whose thread calls interrupt()
// here: a world that was interrupted is resumed by the call that was ended.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <poll.h>
#include <unistd.h>

#include <mutex>

extern "C" {
#include <tutti-ffi.h>
}

namespace tutti_shim {

namespace py = pybind11;

// What is asked of the package; set when it loads this module, and never freed.
struct Package {
    PyObject *failure = nullptr; // the exception for a status that this thread's last call has returned
    PyObject *raises = nullptr;  // whether Ctrl-C raises KeyboardInterrupt
    PyObject *hear = nullptr;    // takes note of signals that came before a call
    PyObject *split = nullptr;   // this rank's backend of a part of a group
    long main_thread = 0;
    int signals = -1; // the descriptor that has something to read when signals have come
};
inline Package package;

inline bool on_main_thread() {
    thread_local const bool is_main = gettid() == package.main_thread;
    return is_main;
}

inline bool finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

// ---- failures ----

// The Python error that is set, for any thread to throw. The lock is held.
inline std::exception_ptr python_failure() {
    python_error error;
    error.persist();
    return std::make_exception_ptr(std::move(error));
}

// Of a call that this thread has just made.
inline std::exception_ptr failure(tutti_status status) {
    if (finalizing())
        return std::make_exception_ptr(c10::DistBackendError({ __func__, __FILE__, __LINE__ }, tutti_error_message()));
    py::gil_scoped_acquire lock;
    PyObject *error = PyObject_CallFunction(package.failure, "i", static_cast<int>(status));
    if (error != nullptr) {
        PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error)), error);
        Py_DECREF(error);
    }
    return python_failure();
}

// Runs the handlers of signals that have come; the main thread's wait goes on where they raise nothing.
inline void hear_signals() {
    py::gil_scoped_acquire lock;
    if (PyErr_CheckSignals() != 0)
        std::rethrow_exception(python_failure());
}

// A signal's handler comes first: where it raises, that is the failure.
inline void check(tutti_status status) {
    if (status == TUTTI_ERROR_INTERRUPTED)
        hear_signals();
    if (status != TUTTI_OK)
        std::rethrow_exception(failure(status));
}

inline bool interrupt_raises() {
    py::gil_scoped_acquire lock;
    PyObject *answer = PyObject_CallNoArgs(package.raises);
    if (answer == nullptr)
        std::rethrow_exception(python_failure());
    bool yes = answer == Py_True;
    Py_DECREF(answer);
    return yes;
}

// ---- calls that may wait ----

struct Interrupts {
    std::mutex lock;
    tutti_world *inside = nullptr; // the world in which the main thread waits
    uint64_t number = 0, last = 0; // which call that is, and how many there were
    bool interrupted = false;
};
inline Interrupts interrupts;

// By the thread that hears signals: the call that the main thread is in, before it looks for signals, and then the end
// of that call, if it is still the same.
inline uint64_t inside() {
    std::lock_guard<std::mutex> guard(interrupts.lock);
    return interrupts.number;
}
inline void interrupt(uint64_t number) {
    std::lock_guard<std::mutex> guard(interrupts.lock);
    if (interrupts.inside != nullptr && interrupts.number == number) {
        tutti_world_interrupt(interrupts.inside);
        interrupts.interrupted = true;
    }
}

// Signals that came before a call are Python's to handle, and do not end it.
inline void hear_earlier_signals() {
    pollfd entry = { package.signals, POLLIN, 0 };
    if (package.signals < 0 || poll(&entry, 1, 0) <= 0)
        return;
    py::gil_scoped_acquire lock;
    PyObject *nothing = PyObject_CallNoArgs(package.hear);
    if (nothing == nullptr)
        std::rethrow_exception(python_failure());
    Py_DECREF(nothing);
}

class Inside {
  public:
    explicit Inside(tutti_world *world) : world_(on_main_thread() ? world : nullptr) {
        if (world_ == nullptr)
            return;
        hear_earlier_signals();
        std::lock_guard<std::mutex> guard(interrupts.lock);
        outer_ = interrupts.inside;
        outer_number_ = interrupts.number;
        interrupts.inside = world_;
        interrupts.number = ++interrupts.last;
    }
    ~Inside() {
        if (world_ == nullptr)
            return;
        std::lock_guard<std::mutex> guard(interrupts.lock);
        interrupts.inside = outer_;
        interrupts.number = outer_number_;
        if (interrupts.interrupted) {
            interrupts.interrupted = false;
            tutti_world_resume(world_);
        }
    }
    Inside(const Inside &) = delete;
    Inside &operator=(const Inside &) = delete;

  private:
    tutti_world *world_, *outer_ = nullptr;
    uint64_t outer_number_ = 0;
};

class Unlocked { // PyTorch has let go of the lock already, on most ways to here
  public:
    Unlocked() : state_(PyGILState_Check() != 0 ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state_ != nullptr)
            PyEval_RestoreThread(state_);
    }
    Unlocked(const Unlocked &) = delete;
    Unlocked &operator=(const Unlocked &) = delete;

  private:
    PyThreadState *state_;
};

template <class Function> tutti_status call(tutti_world *world, Function &&function) {
    Unlocked unlocked;
    Inside inside(world);
    return function();
}

} // namespace tutti_shim
