// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace jaxlowbit::check {

// Prints microseconds from a CTA's store until all CTAs have seen the stores of all, with several ways to wait.
void TimeHops();

}  // namespace jaxlowbit::check
