/* SPDX-License-Identifier: Apache-2.0
 *
 * Pointwise operators on complex numbers: computed in c128, for any layout and type.
 */
#define SUFFIX c128
#include "complex.cuh"
#include "pointwise.cuh"

HERE tu_c128 tu_number_c128(double number) {
    return number;
}
HERE tu_c128 tu_conj_c128(tu_c128 x) {
    return { x.real, -x.imaginary };
}
HERE tu_c128 tu_abs_c128(tu_c128 x) {
    return hypot(x.real, x.imaginary);
}
HERE tu_c128 tu_exp_c128(tu_c128 x) {
    double magnitude = exp(x.real);
    return x.imaginary == 0 ? tu_c128(magnitude, x.imaginary)
                            : tu_c128(magnitude * cos(x.imaginary), magnitude * sin(x.imaginary));
}
/* Near magnitude 1 its square's distance from 1 has the digits that the magnitude has lost. */
HERE tu_c128 tu_log_c128(tu_c128 x) {
    double larger = fmax(fabs(x.real), fabs(x.imaginary)), smaller = fmin(fabs(x.real), fabs(x.imaginary));
    double magnitude = larger > 0.5 && larger < 2 ? log1p((larger - 1) * (larger + 1) + smaller * smaller) / 2
                                                  : log(hypot(x.real, x.imaginary));
    return { magnitude, atan2(x.imaginary, x.real) };
}
/* The part that is a sum of numbers of one sign first, the other one from it. */
HERE tu_c128 tu_sqrt_c128(tu_c128 x) {
    if (x.real == 0 && x.imaginary == 0)
        return { 0, x.imaginary };
    if (is_infinite(x.imaginary))
        return { (double)INFINITY, x.imaginary };
    double part = sqrt((fabs(x.real) + hypot(x.real, x.imaginary)) / 2), other = fabs(x.imaginary) / (2 * part);
    return x.real < 0 ? tu_c128(other, copysign(part, x.imaginary)) : tu_c128(part, copysign(other, x.imaginary));
}

/* A literal has its imaginary part in the place of a stride. */
HERE tu_c128 literal_of(const tu_launch_operand &operand) {
    return { computed<double>::of_bits(operand.data), computed<double>::of_bits((uint64_t)operand.strides[0]) };
}

template <class F> HERE void pointwise_complex(const tu_launch_loop &args) {
    EACH_ELEMENT(i, args.total) {
        places at = places_of(args, i);
        tu_c128 in[TU_LAUNCH_OPERANDS - 1];
        UNROLL
        for (int k = 1; k < TU_LAUNCH_OPERANDS; k++) {
            if (k >= F::OPERANDS)
                continue;
            in[k - 1] =
                args.at[k].literal ? literal_of(args.at[k]) : load_as<tu_c128>(place_of(args, k, at), args.at[k].dtype);
        }
        store_as<tu_c128>(F::apply(in, args.numbers), place_of(args, 0, at), args.at[0].dtype);
    }
}

#define TYPE tu_c128
#define ATTRIBUTE(number) (number)
#undef TU_CONSTANT
#define TU_CONSTANT(name) const double name = *numbers++; /* real also among complex numbers */
#define OPERATOR(...)
#define POINTWISE(form, name, family, summary, arguments, types, expression, properties) \
    COMPLEX_##types(EXPRESSION_WITH(name, SUFFIX, arguments, expression) COMPLEX_KERNEL(name))
#define COMPLEX_KERNEL(name)                  \
    KERNEL(name##_c128, tu_launch_loop) {     \
        pointwise_complex<name##_c128>(args); \
    }
#define COMPLEX_FLOATS(...)
#define COMPLEX_NUMBERS(...)
#define COMPLEX_ALL(...) __VA_ARGS__
#define COMPLEX_FLOATS_COMPLEX(...) __VA_ARGS__
#include "tensor/operators.def"
