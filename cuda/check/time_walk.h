// SPDX-License-Identifier: Apache-2.0
//
// Checks and times the walk (kernels/sm90_stream/walk.h), an experiment, and what it assumes of the GPU.
#pragma once

namespace jaxlowbit::check {

// `driver walk [options]`; returns the exit status:
//   --model 8b|70b --layers L --rows 1|2     the decoder (8b, all its layers, 1)
//   --groups 1|2 --flight F --slack S --sleep N --pages P     WalkOptions; otherwise the defaults
//   --sweep     also times groups, pages in flight and ways to wait
//   --stamps    also prints times of the steps
//   --hops      only times the ways in which CTAs can wait for each other
//   --launches N      timed launches of each kind (15)
int Walk(int argc, char** argv);

}  // namespace jaxlowbit::check
