// Everything that a library of ops and fusions needs; docs/cpp-extension.md shows one.
#pragma once

#include "fuser/declaration.h"
#include "fuser/rule.h"
#include "op/buffer.h"
#include "op/decomposition.h"
#include "op/library.h"
#include "op/op.h"
#include "op/recompute.h"
#include "op/rows.h"
