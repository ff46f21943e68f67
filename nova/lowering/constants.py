"""Constants and polynomials of the elementary functions.

A pair or triple is one number in parts, leading part first: the parts are so short that their products with a small
integer are exact, or fused multiplications with them in turn lose nothing. A list holds coefficients, highest power
first, for float32.
"""

LOG2_E = 1.4426950408889634
LN2_F32 = (0.693359375, -2.12194440e-4)  # the first part has 9 bits
LN2_F64 = (6.93147180369123816490e-01, 1.90821492927058770002e-10)  # the first part ends in 21 zeros
TWO_OVER_PI = 0.63661977236758134
PI_2_F32 = (1.57079637050628662109375, -4.37113882867379288655e-8, -1.71512451000004e-15)
PI_2_F64 = (1.5707963267948966, 6.123233995736766e-17, -1.4973849048591698e-33)
# erf(x) = x + x P(x^2) for |x| < 0.93; erf(t) = 1 - exp(t P(t) - t) for t from there to 4
ERF_NEAR = [-5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1, 1.28379166e-1]
ERF_FAR = [-1.72853470e-5, 3.83197126e-4, -3.88396438e-3, 2.42546219e-2, -1.06777877e-1, -6.34846687e-1, -1.28717512e-1]
# tanh(x) = x + x^3 P(x^2) for |x| < 0.55
TANH_NEAR = [1.57394409e-2, -5.23025580e-2, 1.33152470e-1, -3.33327681e-1]
