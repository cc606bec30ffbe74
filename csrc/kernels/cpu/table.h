// The table of one instruction set: included by one kernels_<isa>.cpp each.
#pragma once

#include "bias.h"
#include "bias_glu.h"
#include "dropout.h"
#include "elementwise.h"
#include "glu.h"
#include "norm.h"
#include "normalize.h"
#include "recomputing.h"
#include "residual.h"
#include "tables.h"

namespace transformer_ops::cpu {
namespace {

constexpr Kernels make_table(const char* isa) {
  return {
      .isa = isa,
      .activation_forward = activation_forward,
      .activation_backward = activation_backward,
      .activation_backward_from_output = activation_backward_from_output,
      .relu_forward = relu_forward,
      .relu_backward = relu_backward,
      .convert_from_acc = convert_from_acc,
      .convert_to_acc = convert_to_acc,
      .glu_forward = glu_forward,
      .glu_backward = glu_backward,
      .bias_glu_forward = bias_glu_forward,
      .layer_norm_forward = layer_norm_forward,
      .layer_norm_backward = layer_norm_backward,
      .layer_norm_residual_backward = layer_norm_residual_backward,
      .rms_norm_forward = rms_norm_forward,
      .rms_norm_backward = rms_norm_backward,
      .rms_norm_residual_backward = rms_norm_residual_backward,
      .l2_norm_forward = l2_norm_forward,
      .l2_norm_backward = l2_norm_backward,
      .normalize = normalize,
      .column_sum = column_sum,
      .bias_add = bias_add,
      .activation_bias_backward = activation_bias_backward,
      .relu_bias_backward = relu_bias_backward,
      .dropout_bias_backward = dropout_bias_backward,
      .glu_bias_backward = glu_bias_backward,
      .activation_value_and_backward = activation_value_and_backward,
      .glu_value_and_backward = glu_value_and_backward,
      .dropout_forward = dropout_forward,
      .dropout_backward = dropout_backward,
      .dropout_backward_from_seed = dropout_backward_from_seed,
      .bias_dropout_add = bias_dropout_add,
      .add_layer_norm_forward = add_layer_norm_forward,
      .add_rms_norm_forward = add_rms_norm_forward,
  };
}

}  // namespace
}  // namespace transformer_ops::cpu
