//! A chart as PNG, with a font of its own: a machine without fonts draws the same.

use std::error::Error;
use std::sync::Arc;

use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::fontdb::Database;
use resvg::usvg::{Options, Tree};

/// So many points for each unit of the chart: it stays sharp on screens of today.
const SCALE: f32 = 2.0;

/// Draws `svg`.
///
/// # Errors
///
/// Where it is no SVG, or one without a size.
pub(crate) fn png(svg: &str) -> Result<Vec<u8>, Box<dyn Error>> {
    let tree = tree(svg)?;
    let size = tree.size().to_int_size().scale_by(SCALE).ok_or("it is too large")?;
    let mut pixels = Pixmap::new(size.width(), size.height()).ok_or("it is too large")?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    Ok(pixels.encode_png()?)
}

/// What `svg` says, with every text laid out.
pub(crate) fn tree(svg: &str) -> Result<Tree, Box<dyn Error>> {
    let mut fonts = Database::new();
    fonts.load_font_data(dejavu::sans_condensed::regular().to_vec());
    fonts.load_font_data(dejavu::sans_condensed::bold().to_vec());
    fonts.set_sans_serif_family("DejaVu Sans");
    Ok(Tree::from_str(svg, &Options { fontdb: Arc::new(fonts), ..Options::default() })?)
}
