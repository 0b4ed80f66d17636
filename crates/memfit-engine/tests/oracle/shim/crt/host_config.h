// The CUDA wheel ships without its `crt` folder; a host compiler needs nothing from this file.
#pragma once
#include "crt/host_defines.h"
