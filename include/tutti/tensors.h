/* SPDX-License-Identifier: Apache-2.0
 *
 * All of libtutti-tensor, in the order in which a newcomer meets it.
 *
 *     tensor.h        tensors, the scopes that own them, the error that stays pending
 *     ops.h           the operators
 *     autograd.h      gradients, hooks, functions with a gradient of one's own
 *     module.h        layers: parameters, children, a forward function
 *     optimizer.h     training a module: optimizers, learning rates, clipping
 *     state.h         a training run in a file, and going on from it
 *     data.h          tokens from a file, and a line that tells how far a run is
 *     functional.h    collectives that return new tensors and can be differentiated
 *     symmetric.h     tensors on symmetric memory, and the operations on them
 *     fused.h         matrix products fused with communication
 *     parallel.h      training on several ranks
 *     graph.h         functions captured as graphs: to look at, to rewrite, to run
 *     backward.h      backwards that are captured once and then run as graphs
 *     compile.h       functions that are captured once and then run as that
 *     io.h            tensors in files: NumPy's formats and safetensors
 *     dlpack.h        tensors that other libraries share
 *     streams.h       tensors on GPUs: streams, waiting, memory
 *
 * libtutti itself is tutti.h, which functional.h needs.
 */
#ifndef TUTTI_TENSORS_H
#define TUTTI_TENSORS_H

#include <tutti/autograd.h>
#include <tutti/backward.h>
#include <tutti/compile.h>
#include <tutti/data.h>
#include <tutti/dlpack.h>
#include <tutti/functional.h>
#include <tutti/fused.h>
#include <tutti/graph.h>
#include <tutti/io.h>
#include <tutti/module.h>
#include <tutti/ops.h>
#include <tutti/optimizer.h>
#include <tutti/parallel.h>
#include <tutti/state.h>
#include <tutti/streams.h>
#include <tutti/symmetric.h>
#include <tutti/tensor.h>

#endif
