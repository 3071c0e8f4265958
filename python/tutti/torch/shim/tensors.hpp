// SPDX-License-Identifier: Apache-2.0
//
// Tensors as the library's buffers: element types, dense copies, and what is refused, in the words of the Python way
// (tutti/torch/group.py).
#pragma once

#include "calls.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <algorithm>
#include <functional>
#include <vector>

namespace tutti_shim {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Finish = std::function<void()>; // brings results to where they belong

inline bool devices_too = false; // tensors of GPUs are allowed: PyTorch has CUDA, and the plug-in is there

inline tutti_dtype dtype_or_none(const Tensor &tensor) {
    switch (tensor.scalar_type()) {
    case at::kDouble:
        return TUTTI_F64;
    case at::kFloat:
        return TUTTI_F32;
    case at::kHalf:
        return TUTTI_F16;
    case at::kBFloat16:
        return TUTTI_BF16;
    case at::kFloat8_e4m3fn:
        return TUTTI_F8_E4M3;
    case at::kFloat8_e5m2:
        return TUTTI_F8_E5M2;
    case at::kChar:
        return TUTTI_I8;
    case at::kShort:
        return TUTTI_I16;
    case at::kInt:
        return TUTTI_I32;
    case at::kLong:
        return TUTTI_I64;
    case at::kByte:
        return TUTTI_U8;
    case at::kUInt16:
        return TUTTI_U16;
    case at::kUInt32:
        return TUTTI_U32;
    case at::kUInt64:
        return TUTTI_U64;
    case at::kBool:
        return TUTTI_BOOL;
    case at::kComplexFloat:
        return TUTTI_C64;
    case at::kComplexDouble:
        return TUTTI_C128;
    default:
        return static_cast<tutti_dtype>(0);
    }
}

inline bool has_place(const Tensor &tensor) {
    return tensor.is_cpu() || (devices_too && tensor.is_cuda());
}

// The element type of a tensor that the library can take.
inline tutti_dtype number(const Tensor &tensor, const char *who) {
    TORCH_CHECK_TYPE(tensor.layout() == at::kStrided, "tutti: ", who, " of a sparse tensor (", tensor.layout(),
                     ") is not supported; .to_dense() makes one that is not");
    TORCH_CHECK_TYPE(
        has_place(tensor), "tutti: ", who, " of a tensor on ", tensor.device(),
        ": this backend is for tensors of the CPU",
        devices_too ? ""
                    : "; those on GPUs need a PyTorch with CUDA and the plug-in libtutti-cuda.so in TUTTI_PLUGIN_PATH");
    tutti_dtype dtype = dtype_or_none(tensor);
    TORCH_CHECK_TYPE(dtype != 0, "tutti: ", who, " of ", tensor.dtype(), ": the library has no such element type");
    return dtype;
}

// All of one element type and on one device, the first's.
inline tutti_dtype alike(const Tensor &first, const Tensors &others, const char *who) {
    for (const Tensor &tensor : others) {
        TORCH_CHECK_TYPE(tensor.device() == first.device(), "tutti: ", who, ": tensors on ", first.device(), " and ",
                         tensor.device(), " cannot be mixed");
        TORCH_CHECK_TYPE(tensor.scalar_type() == first.scalar_type(), "tutti: ", who, ": tensors of ", first.dtype(),
                         " and ", tensor.dtype(), " cannot be mixed");
    }
    return number(first, who);
}

template <class Element> Element &only(std::vector<Element> &elements, const char *who) {
    TORCH_CHECK_VALUE(elements.size() == 1, "tutti: ", who, " takes one tensor on each rank, and was given ",
                      elements.size());
    return elements[0];
}

// A reduction as a call has it: by its number, and for PREMUL_SUM with the factor, one element of the tensor's type on
// the host, which the library reads before the call returns.
struct Reduction {
    tutti_reduction number;
    Tensor factor;

    tutti_reduction of(tutti_call *call) const {
        call->factor = factor.defined() ? factor.const_data_ptr() : nullptr;
        return number;
    }
};

inline Tensor premul_factor(const c10d::ReduceOp &operation, const Tensor &tensor, const char *who) {
    TORCH_CHECK_VALUE(operation.supplement_ != nullptr, "tutti: ", who, ": PREMUL_SUM has no factor");
    const auto &given = static_cast<const c10d::NCCLPreMulSumSupplement &>(*operation.supplement_);
    double factor = given.double_factor;
    if (given.tensor_factor.defined()) {
        TORCH_CHECK_VALUE(!given.tensor_factor.is_complex(), "tutti: ", who,
                          ": the factor of PREMUL_SUM is complex, and has to be a real number");
        factor = given.tensor_factor.item().toDouble(); // of a GPU's tensor: the host waits for it
    }
    return at::full({ 1 }, factor, at::TensorOptions().dtype(c10::toRealValueType(tensor.scalar_type())));
}

inline Reduction reduction(const c10d::ReduceOp &operation, const Tensor &tensor, const char *who) {
    static const tutti_reduction reductions[] = { TUTTI_SUM,  TUTTI_AVG, TUTTI_PRODUCT, TUTTI_MIN,       TUTTI_MAX,
                                                  TUTTI_BAND, TUTTI_BOR, TUTTI_BXOR,    TUTTI_PREMUL_SUM };
    TORCH_CHECK_VALUE(operation.op_ <= c10d::ReduceOp::PREMUL_SUM, "tutti: ", who,
                      " has no reduction of that number; there are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, "
                      "PREMUL_SUM");
    return { reductions[operation.op_],
             operation.op_ == c10d::ReduceOp::PREMUL_SUM ? premul_factor(operation, tensor, who) : Tensor() };
}

// The elements one after the other, with their own values: PyTorch notes on some views only that they are conjugate or
// negative.
inline Tensor dense(const Tensor &tensor) {
    if (tensor.is_contiguous() && !tensor.is_neg() && !tensor.is_conj())
        return tensor;
    return tensor.resolve_conj().resolve_neg().contiguous();
}

// Into a tensor that may be a parameter, or one of inference mode, by whichever thread comes to it.
inline void write(const Tensor &tensor, const Tensor &values) {
    if (tensor.is_inference()) {
        c10::InferenceMode mode;
        tensor.copy_(values);
    } else {
        at::NoGradGuard mode;
        tensor.copy_(values);
    }
}

struct Writable {
    Tensor target;
    Finish finish; // empty where the tensor itself is the target
};

// A dense tensor to write into, and what brings it back where the tensor itself is not dense.
inline Writable writable(const Tensor &tensor) {
    Tensor target = dense(tensor);
    if (target.is_same(tensor))
        return { target, nullptr };
    for (int64_t dim = 0; dim < tensor.dim(); dim++)
        TORCH_CHECK_VALUE(tensor.stride(dim) != 0 || tensor.size(dim) <= 1,
                          "tutti: elements of the tensor share their memory (expand does that), so that no result can "
                          "be written into it; "
                          ".clone() makes one that is whole");
    return { target, [target, tensor] { write(tensor, target.view_as(tensor)); } };
}

// What brings the parts of a dense tensor to where they belong.
inline Finish copies(const Tensor &flat, const Tensors &tensors) {
    return [flat, tensors] {
        int64_t start = 0;
        for (const Tensor &tensor : tensors) {
            int64_t count = tensor.numel();
            write(tensor, flat.narrow(0, start, count).view(tensor.sizes()));
            start += count;
        }
    };
}

inline Tensor flat(const Tensors &tensors) {
    at::NoGradGuard mode;
    if (tensors.size() == 1)
        return dense(tensors[0]).view(-1);
    Tensors rows;
    for (const Tensor &tensor : tensors)
        rows.push_back(tensor.reshape(-1));
    return at::cat(rows);
}

inline std::vector<size_t> counts_of(const Tensors &tensors) {
    std::vector<size_t> counts;
    for (const Tensor &tensor : tensors)
        counts.push_back(static_cast<size_t>(tensor.numel()));
    return counts;
}

inline bool all_equal(const std::vector<size_t> &counts) {
    return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

inline int64_t sum(const std::vector<size_t> &counts) {
    size_t total = 0;
    for (size_t count : counts)
        total += count;
    return static_cast<int64_t>(total);
}

inline size_t count_of(const Tensor &tensor) {
    return static_cast<size_t>(tensor.numel());
}

} // namespace tutti_shim
